"""One module for each query: its Spark SQL, and its program in Tidegate's own API.

A module has

- `SQL`, over the tables `bid`, `auction`, `person` and `side_input`: what the result is;
- `program(nexmark)`, which returns the stream of results;
- `KEY`, if that is a stream of upserts by this key: then the last one of each key counts;
- `TOTALS`, if its rows can't be Spark's: the names of a key and of a number, whose sum for each key is compared instead;
- `KEEPS_BIDS = True`, if every bid is kept in the state.

A stream of changes is compared by the rows that are left.
"""
