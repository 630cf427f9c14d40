"""One file a method, in families. A method is a composition of parts; `registry` holds the usual ones by name."""
