"""Text from a trained model, with the template and the masks' idea of a turn: `rft chat`, and answers in reports."""
