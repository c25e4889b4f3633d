"""What is computed: expression trees, masks, score terms, dropout, and the spec they form."""
