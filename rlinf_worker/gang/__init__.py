"""What the ranks of a gang do together: where they meet, and the loop of steps that a trainer computes in."""
