"""What the lengths of samples tell: statistics, advice on max_length, findings, the profile."""
