"""What `simulate` runs: one room per subject of the runtime whose rules it follows."""
