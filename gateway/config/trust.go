package config

import (
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strings"
)

// checkTLS reports a certificate without its key, and a key without its certificate. With either, a listener that was meant to speak TLS
// would speak clear text.
func (c *Config) checkTLS(bad report) {
	needBoth := func(path, certFile, keyFile string) {
		switch {
		case certFile != "" && keyFile == "":
			bad(path+".cert_file", "a certificate needs its key; set key_file beside it, or remove both")
		case certFile == "" && keyFile != "":
			bad(path+".key_file", "a key needs its certificate; set cert_file beside it, or remove both")
		}
	}
	needBoth("$.tls", c.TLS.CertFile, c.TLS.KeyFile)
	needBoth("$.admin.tls", c.Admin.TLS.CertFile, c.Admin.TLS.KeyFile)
	for name, p := range c.Profiles {
		needBoth("$.profiles."+name, p.CertFile, p.KeyFile)
	}
}

// checkWorkerHosts checks that each entry of admin.worker_hosts is a host or a range of addresses.
func (c *Config) checkWorkerHosts(bad report) {
	for i, h := range c.Admin.WorkerHosts {
		path := fmt.Sprintf("$.admin.worker_hosts[%d]", i)
		if _, err := netip.ParsePrefix(h); err == nil {
			continue
		}
		if strings.Contains(h, "/") {
			bad(path, "%q is no range of addresses; write one such as 10.0.0.0/8", h)
		} else if name := strings.TrimPrefix(h, "*."); name == "" || strings.ContainsAny(name, " *@") || net.ParseIP(name) == nil &&
			strings.Contains(name, ":") {
			bad(path, "%q is no host; write a name, *.suffix, an address or a range such as 10.0.0.0/8, without a port", h)
		}
	}
}

// allowWorker returns an error if no engine may be added at this URL while the proxy runs. An operator who adds an engine makes the proxy
// call its URL with the engines' API key.
func (c *Config) allowWorker(raw string) error {
	id, err := InstanceID(raw)
	if err != nil {
		return nil //nolint:nilerr // the check of the engine reports a wrong URL
	}
	u, err := url.Parse(raw)
	if err != nil {
		return err
	}
	for _, e := range slices.Concat(c.Engines.Prefill, c.Engines.Decode, c.Engines.Aggregated) {
		if known, err := InstanceID(e.URL); err == nil && known == id {
			return nil // the engine is in the file, and is changed or put back into service
		}
	}
	host := strings.TrimRight(strings.ToLower(u.Hostname()), ".")
	addr, err := netip.ParseAddr(host)
	isAddr := err == nil
	addr = addr.WithZone("").Unmap()
	for _, allowed := range c.Admin.WorkerHosts {
		allowed = strings.ToLower(allowed)
		if prefix, err := netip.ParsePrefix(allowed); err == nil {
			if isAddr && prefix.Contains(addr) {
				return nil
			}
		} else if address, err := netip.ParseAddr(allowed); err == nil {
			if isAddr && address.Unmap() == addr {
				return nil
			}
		} else if suffix, ok := strings.CutPrefix(allowed, "*"); allowed == host || ok && !isAddr && strings.HasSuffix(host, suffix) {
			return nil
		}
	}
	switch {
	case len(c.Admin.WorkerHosts) > 0:
		return fmt.Errorf("%s is not among admin.worker_hosts; add it there, or the engine to the file", host)
	case isAddr && (noEngine(addr) || slices.ContainsFunc(embedded(addr), noEngine)):
		return fmt.Errorf("%s is, or leads to, a link-local, multicast or unspecified address, or a cloud's metadata address; no engine is "+
			"expected there; if there is one, name it in admin.worker_hosts", host)
	case slices.Contains(metadataNames, host):
		return fmt.Errorf("%s is a cloud's metadata address; no engine is expected there; if there is one, name it in admin.worker_hosts", host)
	case isNumber(host):
		return fmt.Errorf("%s can be read as more than one address; write a name or a plain address", host)
	}
	return nil
}

// noEngine says whether no engine can be at an address. Clouds keep the credentials of their machines at some addresses, mostly at
// 169.254.169.254, which is link-local.
func noEngine(a netip.Addr) bool {
	return a.IsLinkLocalUnicast() || a.IsMulticast() || a.IsUnspecified() || slices.Contains(metadataAddrs, a)
}

var metadataAddrs = []netip.Addr{
	netip.MustParseAddr("fd00:ec2::254"),   // AWS
	netip.MustParseAddr("fd20:ce::254"),    // Google Cloud
	netip.MustParseAddr("100.100.100.200"), // Alibaba Cloud
	netip.MustParseAddr("168.63.129.16"),   // Azure
	netip.MustParseAddr("192.0.0.192"),     // Oracle Cloud, classic
}

var metadataNames = []string{
	"metadata", "metadata.google.internal", "metadata.goog", "metadata.azure.internal", "instance-data", "instance-data.ec2.internal",
	"metadata.tencentyun.com", "metadata.platformequinix.com",
}

// embedded returns the IPv4 addresses to which a router or a tunnel on the way
// may translate an IPv6 address.
func embedded(a netip.Addr) []netip.Addr {
	if !a.Is6() {
		return nil
	}
	b := a.As16()
	v4 := func(b []byte) netip.Addr { return netip.AddrFrom4([4]byte(b)) }
	in := func(prefix string) bool { return netip.MustParsePrefix(prefix).Contains(a) }
	last := v4(b[12:])
	switch {
	case in("64:ff9b:1::/48"): // local NAT64: its prefix has 48, 56, 64 or 96 bits, and each puts the IPv4 address elsewhere
		return []netip.Addr{last, v4([]byte{b[6], b[7], b[9], b[10]}), v4([]byte{b[7], b[9], b[10], b[11]}), v4(b[9:13])}
	case in("64:ff9b::/96"), in("::/96"), in("::ffff:0:0/96"), in("::ffff:0:0:0/96"): // NAT64; compatible, mapped and translated forms
		return []netip.Addr{last}
	case in("2002::/16"): // 6to4
		return []netip.Addr{v4(b[2:6])}
	case in("2001::/32"): // Teredo: server, and client
		return []netip.Addr{v4(b[4:8]), v4([]byte{^b[12], ^b[13], ^b[14], ^b[15]})}
	case b[8]&^2 == 0 && b[9] == 0 && b[10] == 0x5e && b[11] == 0xfe: // ISATAP
		return []netip.Addr{last}
	}
	return nil
}

// isNumber says whether some resolvers read a host as an address although netip does not, such as 2852039166, 0xa9fea9fe or
// 0251.0376.169.254.
func isNumber(host string) bool {
	if _, err := netip.ParseAddr(host); err == nil {
		return false
	}
	last := host[strings.LastIndexByte(host, '.')+1:]
	return last != "" && strings.Trim(last, "0123456789") == "" || strings.HasPrefix(last, "0x")
}
