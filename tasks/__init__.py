"""What a policy is asked and what it is paid for: one task a file."""
