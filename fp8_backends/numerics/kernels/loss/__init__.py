"""The cross-entropy of logits with its gradient: `dispatch`."""
