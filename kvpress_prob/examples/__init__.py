"""Floor 5: questions with accepted answers, and the metrics that score a prediction."""
