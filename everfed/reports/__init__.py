"""Reports of runs: tables, plots, one HTML file, and a live page."""
