"""One file per idea. A method is a composition of these parts; `everfed.methods` holds the usual ones by name."""
