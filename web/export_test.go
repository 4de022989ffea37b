package web

import "crypto/tls"

// ConfigOf is a TLS server's with a certificate.
func ConfigOf(c *Certificate) *tls.Config {
	return &tls.Config{MinVersion: tls.VersionTLS13, GetCertificate: c.get, NextProtos: []string{"http/1.1"}}
}
