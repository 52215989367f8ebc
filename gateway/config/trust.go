package config

import (
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strings"
)

// checkTLS: a certificate without its key, or the other way round, would leave
// a listener in clear text that was meant not to be.
func (c *Config) checkTLS(bad report) {
	both := func(path, certFile, keyFile string) {
		switch {
		case certFile != "" && keyFile == "":
			bad(path+".cert_file", "a certificate needs its key; set key_file beside it, or remove both")
		case certFile == "" && keyFile != "":
			bad(path+".key_file", "a key needs its certificate; set cert_file beside it, or remove both")
		}
	}
	both("$.tls", c.TLS.CertFile, c.TLS.KeyFile)
	both("$.admin.tls", c.Admin.TLS.CertFile, c.Admin.TLS.KeyFile)
	for name, p := range c.Profiles {
		both("$.profiles."+name, p.CertFile, p.KeyFile)
	}
}

func (c *Config) checkWorkerHosts(bad report) {
	for i, h := range c.Admin.WorkerHosts {
		path := fmt.Sprintf("$.admin.worker_hosts[%d]", i)
		if _, err := netip.ParsePrefix(h); err == nil {
			continue
		}
		if strings.Contains(h, "/") {
			bad(path, "%q is no range of addresses; write one such as 10.0.0.0/8", h)
		} else if name := strings.TrimPrefix(h, "*."); name == "" || strings.ContainsAny(name, " *@") || net.ParseIP(name) == nil && strings.Contains(name, ":") {
			bad(path, "%q is no host; write a name, *.suffix, an address or a range such as 10.0.0.0/8, without a port", h)
		}
	}
}

// allowWorker says whether an engine at this URL may be added while the proxy
// runs: whoever may add one makes the proxy call it, with the engines' key.
func (c *Config) allowWorker(raw string) error {
	id, err := InstanceID(raw)
	if err != nil {
		return nil //nolint:nilerr // reported as what it is
	}
	u, err := url.Parse(raw)
	if err != nil {
		return err
	}
	for _, e := range slices.Concat(c.Engines.Prefill, c.Engines.Decode) {
		if known, err := InstanceID(e.URL); err == nil && known == id {
			return nil // described anew, or its drain taken back
		}
	}
	host := strings.TrimSuffix(strings.ToLower(u.Hostname()), ".")
	addr, err := netip.ParseAddr(host)
	isAddr := err == nil
	addr = addr.WithZone("").Unmap()
	for _, allowed := range c.Admin.WorkerHosts {
		allowed = strings.ToLower(allowed)
		if prefix, err := netip.ParsePrefix(allowed); err == nil {
			if isAddr && prefix.Contains(addr) {
				return nil
			}
		} else if one, err := netip.ParseAddr(allowed); err == nil {
			if isAddr && one.Unmap() == addr {
				return nil
			}
		} else if suffix, ok := strings.CutPrefix(allowed, "*"); allowed == host || ok && !isAddr && strings.HasSuffix(host, suffix) {
			return nil
		}
	}
	switch {
	case len(c.Admin.WorkerHosts) > 0:
		return fmt.Errorf("%s is not among admin.worker_hosts; add it there, or the engine to the file", host)
	case isAddr && (addr.IsLinkLocalUnicast() || addr.IsMulticast() || addr.IsUnspecified()):
		// 169.254.169.254 is where clouds keep credentials; no engine is at any of these.
		return fmt.Errorf("%s is a link-local, multicast or unspecified address, where no engine is expected; if one is, name it in admin.worker_hosts", host)
	case isNumber(host):
		return fmt.Errorf("%s may be read as an address in several ways; write a name or a plain address", host)
	}
	return nil
}

// isNumber finds what some resolvers take for an address and netip does not:
// 2852039166, 0xa9fea9fe, 0251.0376.169.254.
func isNumber(host string) bool {
	if _, err := netip.ParseAddr(host); err == nil {
		return false
	}
	last := host[strings.LastIndexByte(host, '.')+1:]
	return last != "" && strings.Trim(last, "0123456789") == "" || strings.HasPrefix(last, "0x")
}
