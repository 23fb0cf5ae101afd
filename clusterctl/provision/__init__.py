"""Software for nodes without internet: lock files, wheelhouses, bundles, and the environments made of them."""
