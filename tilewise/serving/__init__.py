"""Attention over caches: keys and values kept between calls, in one piece or in pages."""
