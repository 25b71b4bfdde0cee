"""One engine per technology: it moves values durably and knows no word of the domain."""
