"""Several ranks: collectives, sharded weights, and a metric that is shared out among the ranks."""
