"""From pairs of blocks to verdicts and a recommendation. Pure: everything here is a function of stored records."""
