"""From what a job wants and what exists to what is written: observe, decide (pure), apply, and the loop around them."""
