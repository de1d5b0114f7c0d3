import warnings

# For a class torch is enough. Without numpy its import warns, which tells a student nothing.
warnings.filterwarnings("ignore", "Failed to initialize NumPy")
