"""Reports in a real browser. `make test-browser` sets it up; no other target collects these."""
