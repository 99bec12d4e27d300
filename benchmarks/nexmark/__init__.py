"""The Nexmark suite: an online auction's persons, auctions and bids, and the queries on them.

`events` makes the events, `queries/` has a file for each query (its Spark SQL and its program), `checking` compares the two,
and `run` measures.
"""
