"""What a real language model needs beside train.py: speed, GSM8K, and two neighbours' extras."""
