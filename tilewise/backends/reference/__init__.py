"""The reference: `naive` (full scores, the oracle) and `blockwise` (tiles, O(N) memory), in torch operations."""
