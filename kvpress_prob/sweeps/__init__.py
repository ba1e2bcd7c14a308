"""Floor 6: presses x ratios x seeds over examples, written to a results folder."""
