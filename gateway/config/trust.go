package config

import (
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strings"
)

// checkTLS reports a certificate without its key, or a key without its certificate. With only one
// of the two, a listener that was meant to speak TLS could run in clear text.
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
		if _, err := netip.ParsePrefix(h); err == nil { // a range of addresses
			continue
		}
		name := strings.TrimPrefix(h, "*.")
		hasPort := net.ParseIP(name) == nil && strings.Contains(name, ":") // an IPv6 address has colons, too
		if strings.Contains(h, "/") {
			bad(path, "%q is no range of addresses; write one such as 10.0.0.0/8", h)
		} else if name == "" || strings.ContainsAny(name, " *@") || hasPort {
			bad(path, "%q is no host; write a name, *.suffix, an address or a range such as 10.0.0.0/8, without a port", h)
		}
	}
}

// allowWorker returns why an operator may not add the engine with this URL while the proxy runs;
// nil: it may be added. Without this check, whoever may add engines could make the proxy send the
// engines' API key to any host. Engines of the config file are always allowed. The host of any
// other engine must be in admin.worker_hosts. If that list is empty, any host is allowed, except
// addresses at which no engine can be, such as a cloud's metadata address, and hosts that can be
// read as several addresses.
func (c *Config) allowWorker(raw string) error {
	id, err := InstanceID(raw)
	if err != nil {
		return nil //nolint:nilerr // checkEngine reports a wrong URL
	}
	u, err := url.Parse(raw)
	if err != nil {
		return err
	}
	for _, e := range slices.Concat(c.Engines.Prefill, c.Engines.Decode, c.Engines.Aggregated) {
		if listed, err := InstanceID(e.URL); err == nil && listed == id {
			return nil // an engine of the file may always be added again
		}
	}
	host := strings.TrimRight(strings.ToLower(u.Hostname()), ".")
	addr, _ := netip.ParseAddr(host) // invalid if the host is a name
	addr = addr.WithZone("").Unmap()
	isListed := slices.ContainsFunc(c.Admin.WorkerHosts, func(entry string) bool { return coversHost(strings.ToLower(entry), host, addr) })
	switch {
	case isListed:
		return nil
	case len(c.Admin.WorkerHosts) > 0:
		return fmt.Errorf("%s is not among admin.worker_hosts; add it there, or the engine to the file", host)
	case addr.IsValid() && (cannotBeEngine(addr) || slices.ContainsFunc(embeddedIPv4(addr), cannotBeEngine)):
		return fmt.Errorf("%s is, or leads to, a link-local, multicast or unspecified address, or a cloud's metadata address; no engine is "+
			"expected there; if there is one, name it in admin.worker_hosts", host)
	case slices.Contains(metadataNames, host):
		return fmt.Errorf("%s is a cloud's metadata address; no engine is expected there; if there is one, name it in admin.worker_hosts", host)
	case readsAsNumber(host):
		return fmt.Errorf("%s can be read as more than one address; write a name or a plain address", host)
	}
	return nil
}

// coversHost says whether an entry of admin.worker_hosts covers a host. addr is the host as an
// address; invalid: the host is a name.
func coversHost(entry, host string, addr netip.Addr) bool {
	if prefix, err := netip.ParsePrefix(entry); err == nil {
		return prefix.Contains(addr)
	}
	if address, err := netip.ParseAddr(entry); err == nil {
		return addr.IsValid() && address.Unmap() == addr
	}
	suffix, isPattern := strings.CutPrefix(entry, "*") // such as *.example.com
	isName := !addr.IsValid()
	return entry == host || isPattern && isName && strings.HasSuffix(host, suffix)
}

// cannotBeEngine says whether an address cannot be that of an engine. This includes metadata
// addresses, at which clouds serve the credentials of their machines. Most clouds use
// 169.254.169.254, which is link-local.
func cannotBeEngine(a netip.Addr) bool {
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

// embeddedIPv4 returns the IPv4 addresses inside an IPv6 address; nil: there is none. A router or a
// tunnel may send packets for the IPv6 address to one of these IPv4 addresses.
func embeddedIPv4(a netip.Addr) []netip.Addr {
	if !a.Is6() {
		return nil
	}
	b := a.As16()
	// v4 makes an IPv4 address of four bytes, and in says whether the address is in a range.
	v4 := func(b []byte) netip.Addr { return netip.AddrFrom4([4]byte(b)) }
	in := func(prefix string) bool { return netip.MustParsePrefix(prefix).Contains(a) }
	last := v4(b[12:])
	switch {
	case in("64:ff9b:1::/48"): // local-use NAT64: depending on the length of its prefix, the IPv4 address is in one of four places
		return []netip.Addr{last, v4([]byte{b[6], b[7], b[9], b[10]}), v4([]byte{b[7], b[9], b[10], b[11]}), v4(b[9:13])}
	// NAT64, and the IPv4-compatible, IPv4-mapped and IPv4-translated forms
	case in("64:ff9b::/96"), in("::/96"), in("::ffff:0:0/96"), in("::ffff:0:0:0/96"):
		return []netip.Addr{last}
	case in("2002::/16"): // 6to4: the IPv4 address follows the prefix
		return []netip.Addr{v4(b[2:6])}
	case in("2001::/32"): // Teredo: the server's address, and the client's, whose bits are inverted
		return []netip.Addr{v4(b[4:8]), v4([]byte{^b[12], ^b[13], ^b[14], ^b[15]})}
	case b[8]&^2 == 0 && b[9] == 0 && b[10] == 0x5e && b[11] == 0xfe: // ISATAP; b[8] is 2 if the IPv4 address is a global one
		return []netip.Addr{last}
	}
	return nil
}

// readsAsNumber says whether some resolvers would read a host as an IPv4 address although netip
// does not. Examples: 2852039166, 0xa9fea9fe, 0251.0376.169.254.
func readsAsNumber(host string) bool {
	if _, err := netip.ParseAddr(host); err == nil { // a plain address, which has only one reading
		return false
	}
	last := host[strings.LastIndexByte(host, '.')+1:] // the last label of a DNS name is never a number
	isDecimal := last != "" && strings.Trim(last, "0123456789") == ""
	return isDecimal || strings.HasPrefix(last, "0x")
}
