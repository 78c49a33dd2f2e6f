"""Networks trained from scratch on Sudoku 6 × 6, beside their peers."""
