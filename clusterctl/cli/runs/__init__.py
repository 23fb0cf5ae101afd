"""Commands on runs that exist: `runs`, `status`, `top`, `logs`, `report`."""
