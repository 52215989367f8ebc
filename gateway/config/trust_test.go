package config

import (
	"crypto/tls"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/gateway/certs/certtest"
	"evenkeel/mooncake"
)

func TestTLSNeedsBothFiles(t *testing.T) {
	for _, tt := range []struct{ name, text, want string }{
		{"a certificate without its key", "tls: {cert_file: c.pem}\n", "1:18: tls.cert_file: a certificate needs its key"},
		{"a key without its certificate", "tls: {key_file: c.key}\n", "tls.key_file: a key needs its certificate"},
		{"the admin listener's", "admin: {tls: {cert_file: c.pem}}\n", "admin.tls.cert_file"},
		{"a profile's", "profiles: {ascend: {key_file: c.key}}\n", "profiles.ascend.key_file"},
		{"trust that would not be asked for", "profiles: {ascend: {ca_file: ca.pem}}\nengines: {prefill: [{url: \"http://p0:8100\"}]}\n", "in clear text; write https"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := Parse("x.yaml", []byte(tt.text))
			require.ErrorContains(t, err, tt.want)
		})
	}
	c, err := Parse("x.yaml", []byte("tls: {cert_file: c.pem, key_file: c.key}\n"))
	require.NoError(t, err)
	require.True(t, c.TLS.On())
	require.False(t, c.Admin.TLS.On())
}

func TestATargetBehindTLSNeedsFilesThatCanBeRead(t *testing.T) {
	_, err := Target(Engine{URL: "https://p0"}, &mooncake.Profile{Name: "far", CAFile: "/nowhere/ca.pem"})
	require.ErrorContains(t, err, "engine p0:443: profile far: ca_file")
	named, err := Target(Engine{URL: "https://10.0.0.1:8100"}, &mooncake.Profile{ServerName: "engine.internal"})
	require.NoError(t, err)
	require.Equal(t, "engine.internal", named.TLS.ServerName)
}

func TestWhereEnginesMayBeAdded(t *testing.T) {
	anywhere := []string(nil)
	for _, tt := range []struct {
		name    string
		allowed []string
		url     string
		want    string // of the error; empty: allowed
	}{
		{"anywhere, by name", anywhere, "http://p9:8100", ""},
		{"anywhere, by address", anywhere, "http://10.0.0.1:8100", ""},
		{"loopback, for a sidecar", anywhere, "http://127.0.0.1:8100", ""},
		{"where clouds keep credentials", anywhere, "http://169.254.169.254", "link-local"},
		{"the same in IPv6 clothes", anywhere, "http://[::ffff:169.254.169.254]", "link-local"},
		{"IPv6 link-local with a zone", anywhere, "http://[fe80::1%25eth0]:8100", "link-local"},
		{"the same as one number", anywhere, "http://2852039166", "more than one address"},
		{"the same in hex", anywhere, "http://0xa9fea9fe", "more than one address"},
		{"the same in octal", anywhere, "http://0251.0376.0251.0376", "more than one address"},
		{"through NAT64", anywhere, "http://[64:ff9b::169.254.169.254]", "leads to"},
		{"through a NAT64 of one's own", anywhere, "http://[64:ff9b:1::a9fe:a9fe]", "leads to"},
		{"by its shortest prefix", anywhere, "http://[64:ff9b:1:a9fe:a9:fe00::]", "leads to"},
		{"through 6to4", anywhere, "http://[2002:a9fe:a9fe::1]", "leads to"},
		{"through Teredo", anywhere, "http://[2001::5601:5601]", "leads to"},
		{"through ISATAP", anywhere, "http://[fd00::5efe:a9fe:a9fe]", "leads to"},
		{"translated", anywhere, "http://[::ffff:0:169.254.169.254]", "leads to"},
		{"compatible", anywhere, "http://[::169.254.169.254]", "leads to"},
		{"the service of AWS in IPv6", anywhere, "http://[fd00:ec2::254]", "metadata address"},
		{"of Alibaba", anywhere, "http://100.100.100.200", "metadata address"},
		{"of Azure", anywhere, "http://168.63.129.16", "metadata address"},
		{"of Azure, mapped", anywhere, "http://[::ffff:168.63.129.16]", "metadata address"},
		{"by name", anywhere, "http://Metadata.Google.Internal.", "metadata address"},
		{"an engine behind NAT64", anywhere, "http://[64:ff9b::10.0.0.1]:8100", ""},
		{"an engine of its own network in IPv6", anywhere, "http://[fd00::1]:8100", ""},
		{"one in the loopback of IPv6", anywhere, "http://[::1]:8100", ""},
		{"what is named is meant", []string{"168.63.129.16"}, "http://168.63.129.16", ""},
		{"the unspecified address is this host", anywhere, "http://0.0.0.0:9090", "unspecified"},
		{"multicast", anywhere, "http://224.0.0.1:80", "multicast"},
		{"another scheme", anywhere, "ftp://p9", "not an engine's URL"},
		{"a file", anywhere, "file:///etc/passwd", "not an engine's URL"},
		{"user and password", anywhere, "http://u:p@p9:8100", "more than a host and a port"},
		{"a path", anywhere, "http://p9:8100/v1", "more than a host and a port"},
		{"a query", anywhere, "http://p9:8100?x=y", "more than a host and a port"},
		{"a listed name", []string{"p9"}, "http://P9:8100", ""},
		{"a listed name with its dot", []string{"p9"}, "http://p9.:8100", ""},
		{"another name", []string{"p9"}, "http://p8:8100", "not among admin.worker_hosts"},
		{"a suffix", []string{"*.pd.internal"}, "https://d1.pd.internal:8100", ""},
		{"a suffix needs its dot", []string{"*.pd.internal"}, "https://evilpd.internal", "not among"},
		{"the suffix itself is not below it", []string{"*.pd.internal"}, "https://pd.internal", "not among"},
		{"a range", []string{"10.0.0.0/8"}, "http://10.200.3.4:8100", ""},
		{"outside the range", []string{"10.0.0.0/8"}, "http://11.0.0.1:8100", "not among"},
		{"a range says nothing of names", []string{"0.0.0.0/0"}, "http://p9:8100", "not among"},
		{"an address", []string{"fd00::1"}, "http://[fd00:0::1]:8100", ""},
		{"link-local, if named", []string{"169.254.0.0/16"}, "http://169.254.1.1:8100", ""},
		{"an engine of the file is known", []string{"p9"}, "http://d0:8200", ""},
		{"its host is not", []string{"p9"}, "http://d0:8201", "not among"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := Default()
			c.Admin.WorkerHosts = tt.allowed
			c.Engines.Decode = []Engine{{URL: "http://d0:8200", Slots: 1}}
			require.NoError(t, c.Validate())
			_, err := c.Complete("decode", Engine{URL: tt.url})
			if tt.want == "" {
				require.NoError(t, err)
			} else {
				require.ErrorContains(t, err, tt.want)
			}
		})
	}
}

func TestWorkerHostsThatMatchNothingAreRefused(t *testing.T) {
	for _, h := range []string{"", "*", "*.", "p9:8100", "http://p9", "10.0.0.0/99", "a b", "u@p9"} {
		c := Default()
		c.Admin.WorkerHosts = []string{h}
		require.ErrorContains(t, c.Validate(), "admin.worker_hosts[0]", "%q", h)
	}
}

// The collector and this proxy may get new certificates of a new authority while the proxy runs.
func TestTheFilesOfACollectorAreReadForEveryHandshake(t *testing.T) {
	dir := t.TempDir()
	ca, cert, key := filepath.Join(dir, "ca.pem"), filepath.Join(dir, "tls.pem"), filepath.Join(dir, "tls.key")
	copyTo := func(to, from string) {
		text, err := os.ReadFile(from)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(to, text, 0o600))
	}
	use := func(a *certtest.Authority) {
		ownCert, ownKey := a.Issue(t, "proxy", time.Now().Add(time.Hour))
		copyTo(ca, a.File)
		copyTo(cert, ownCert)
		copyTo(key, ownKey)
	}
	before, after := certtest.New(t), certtest.New(t)
	use(before)
	for _, endpoint := range []string{"https://collector:4318", "127.0.0.1:4318"} {
		use(before)
		conf := Tracing{Endpoint: endpoint, TLS: CollectorTLS{CAFile: ca, CertFile: cert, KeyFile: key}}
		client, err := conf.ClientTLS()
		require.NoError(t, err)
		shakes := func(a *certtest.Authority) bool {
			server := a.Server(t, "collector")
			server.ClientAuth, server.ClientCAs = tls.RequireAndVerifyClientCert, a.Pool()
			server.SessionTicketsDisabled = true // the client would have to read them
			here, there := net.Pipe()
			done := make(chan error, 1)
			go func() { done <- tls.Server(there, server).Handshake() }()
			c := client.Clone()
			c.ServerName, _, _ = strings.Cut(strings.TrimPrefix(endpoint, "https://"), ":") // as net/http does
			mine := tls.Client(here, c).Handshake()
			_ = here.Close()
			return mine == nil && <-done == nil
		}
		require.True(t, shakes(before))
		require.False(t, shakes(after))
		use(after)
		require.True(t, shakes(after), endpoint)
		require.False(t, shakes(before))
	}
	_, err := (&Tracing{Endpoint: "https://collector", TLS: CollectorTLS{CAFile: filepath.Join(dir, "none")}}).ClientTLS()
	require.ErrorContains(t, err, "tracing.tls.ca_file")
	none, err := (&Tracing{Endpoint: "https://collector"}).ClientTLS()
	require.NoError(t, err)
	require.Nil(t, none)
}
