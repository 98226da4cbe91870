"""What the studies share: a store of results, intervals, pages, plots and servers."""
