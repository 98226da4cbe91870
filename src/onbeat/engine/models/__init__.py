"""Model families, one file each, and the table of them."""
