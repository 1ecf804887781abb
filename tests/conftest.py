"""What every test runs under. Nothing here is about one part; builders and fakes are in files of their own."""
