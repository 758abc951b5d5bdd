"""From a train step to jaxprs: the loss, its gradient call, the update, and what a microbatch means."""
