"""Parts of the benchmark `operator`: a cluster of fake nodes, stub drivers, load, and what is measured on them."""
