"""Parts of the benchmark `runtime`: a file for each thing that is measured, with its rows."""
