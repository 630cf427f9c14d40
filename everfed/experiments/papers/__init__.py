"""The tables and figures of the papers: the printed numbers, the runs that reproduce them, and the comparison.

tables       what the papers print (targets.csv), the recipe, method and metric of a cell (tables.toml), and what no
             record says (notes/PAPER.toml)
planning     every cell of a table with the runs behind it, or the reason why there are none
records      what is kept of a run that finished or diverged, in the repository
shortfall    what a run lacks of the experiment that the paper states, and of the published data sets
measures     a cell's number from a run
judging      which run a record is; ours against the paper's: the level, and the effect over the baseline
writing      all that as a table, Markdown, CSV and JSON
reproducing  `everfed.reproduce`: a table, run and judged
overview     every table with what can be run of it and what that costs; with its records, verdicts and what is planned
plot         ours and the paper's numbers as a dot plot
pages        REPRODUCIBILITY.md and docs/results/, from all that
"""
