"""Models from `transformers`: read, attention that keeps documents apart, own loss head, verified swaps."""
