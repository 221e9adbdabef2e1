"""Programs for those who build and install Strata; the daemon itself imports none of them."""
