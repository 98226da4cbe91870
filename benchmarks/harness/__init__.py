"""What the studies share: a store of results, intervals, pages and plots."""
