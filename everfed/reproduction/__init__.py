"""The tables and figures of the papers: the printed numbers, the runs that reproduce them, and the comparison.

targets     what the papers print, one row per cell (targets.csv)
tables      which recipe, method and metric stand for a cell (tables.toml)
planning    every cell of a table with the runs behind it, or the reason why there are none
cost        how many training samples a plan processes
listing     every table with what can be run of it and what that costs
measures    a cell's number from a run
judging     ours against the paper's: difference, acceptance, paired differences over seeds
writing     all that as a table, Markdown, CSV and JSON
"""
