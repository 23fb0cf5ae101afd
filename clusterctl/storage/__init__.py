"""Object stores: S3 and what speaks its protocol, such as OBS. Addresses, credentials, uploads, downloads."""
