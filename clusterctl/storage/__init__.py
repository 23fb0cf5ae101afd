"""Object stores with the protocol of S3, such as OBS: addresses, credentials, uploads, downloads."""
