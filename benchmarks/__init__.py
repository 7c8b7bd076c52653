"""Side-by-side measurements; ``make bench`` runs them and writes their figures."""
