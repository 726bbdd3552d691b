//! The switch: forwarding table, forwarding, workers, statistics
