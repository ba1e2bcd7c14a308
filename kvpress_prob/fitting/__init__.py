"""Floor 6: fits surrogates to a model: texts, passes over them, and what is accumulated of them."""
