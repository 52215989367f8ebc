package config

import (
	"crypto/sha256"
	"crypto/tls"
	"encoding/hex"
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strings"

	"evenkeel/gateway/certs"
	"evenkeel/gateway/tracing"
)

// Tracing says where the spans of requests are sent (docs/traces.md). For settings that the file
// leaves out, OpenTelemetry's own environment variables apply.
type Tracing struct {
	Endpoint string `yaml:"endpoint"` // URL of the collector; empty: no spans are sent
	Insecure bool   `yaml:"insecure"`
	// Sample is the share of requests that are traced, 0 to 1. It does not apply to requests for which
	// a trusted caller has decided.
	Sample      float64           `yaml:"sample"`
	Headers     Headers           `yaml:"headers"`
	TLS         CollectorTLS      `yaml:"tls"`
	ServiceName string            `yaml:"service_name"`
	Resource    map[string]string `yaml:"resource_attributes"`
}

// CollectorTLS has the certificate authorities that verify the collector, and the proxy's own
// client certificate.
type CollectorTLS struct {
	CAFile   string `yaml:"ca_file"` // PEM file; empty: the system's authorities
	CertFile string `yaml:"cert_file"`
	KeyFile  string `yaml:"key_file"`
}

// Headers may hold credentials, so their String shows hashes instead of values.
type Headers map[string]string

// String returns the names of the headers with short hashes of their values, so that a diff shows
// which values changed.
func (h Headers) String() string {
	var list []string
	for _, k := range slices.Sorted(maps.Keys(h)) {
		sum := sha256.Sum256([]byte(h[k]))
		list = append(list, k+": sha256 "+hex.EncodeToString(sum[:4])+"..")
	}
	return strings.Join(list, ", ")
}

// RecordsReasons says whether the reasons of decisions are recorded. Only receipts show them, so
// nothing is recorded without receipts.
func (c *Config) RecordsReasons() bool { return c.Admin.Receipts > 0 }

// ClientTLS returns the TLS settings for the collector; nil: no file is set. The files are read
// again for every handshake.
func (t *Tracing) ClientTLS() (*tls.Config, error) {
	if t.TLS == (CollectorTLS{}) {
		return nil, nil
	}
	endpoint, err := tracing.Endpoint(t.Endpoint, t.Insecure)
	if err != nil {
		return nil, fmt.Errorf("tracing.endpoint: %w", err)
	}
	u, err := url.Parse(endpoint)
	if err != nil {
		return nil, fmt.Errorf("tracing.endpoint: %w", err)
	}
	return t.TLS.clientTLS(u.Hostname())
}

// clientTLS returns the TLS settings for a collector. host is the name that the collector's
// certificate must have.
func (t CollectorTLS) clientTLS(host string) (*tls.Config, error) {
	const serverName, caFile = "", "" // the server's name is that of the URL; CAFile is followed below
	c, err := certs.Client(serverName, caFile, t.CertFile, t.KeyFile)
	if err != nil {
		return nil, fmt.Errorf("tracing.tls: %w", err)
	}
	if t.CAFile != "" { // otherwise crypto/tls checks the certificate and its name by the system's authorities
		// Follow reads the file again for each handshake. It checks the certificate in place of
		// crypto/tls, and so needs the name.
		if err := certs.Follow(c, t.CAFile, host); err != nil {
			return nil, fmt.Errorf("tracing.tls.ca_file: %w", err)
		}
	}
	return c, nil
}

// checkTracing checks the keys of tracing, and also admin.receipts and admin.receipts_bytes.
func (c *Config) checkTracing(bad report) {
	t := &c.Tracing
	if c.Admin.Receipts < 0 {
		bad("$.admin.receipts", "%d is no number of requests; write 0 to keep none", c.Admin.Receipts)
	}
	if c.Admin.ReceiptsBytes < 1<<16 {
		bad("$.admin.receipts_bytes", "%d bytes hold no receipts; write 65536 or more, and receipts: 0 to keep none", c.Admin.ReceiptsBytes)
	}
	if t.Endpoint != "" {
		if _, err := tracing.Endpoint(t.Endpoint, t.Insecure); err != nil {
			bad("$.tracing.endpoint", "%v", err)
		}
	}
	if !(t.Sample >= 0 && t.Sample <= 1) { // in this form, NaN is refused as well
		bad("$.tracing.sample", "%v is no share of requests; write a number from 0 to 1, such as 0.1", t.Sample)
	}
	if (t.TLS.CertFile == "") != (t.TLS.KeyFile == "") {
		bad("$.tracing.tls", "a certificate and its key go together; write both cert_file and key_file, or neither")
	}
	for name := range t.Headers {
		if name == "" || strings.ContainsAny(name, " :\r\n") {
			bad("$.tracing.headers", "%q is no header's name", name)
		}
	}
}
