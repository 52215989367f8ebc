package config

import (
	"cmp"
	"fmt"
	"net"
	"net/url"
	"os"
	"strconv"
	"strings"

	"evenkeel/engine"
	"evenkeel/gateway/certs"
	"evenkeel/mooncake"
)

// InstanceID returns the name of an engine everywhere in evenkeel: the host:port of its URL. It
// fails if the URL has anything besides.
func InstanceID(raw string) (string, error) {
	if strings.Contains(raw, ",") {
		return "", fmt.Errorf("%q names more than one engine; write an entry for each, with http://host:port", raw)
	}
	u, err := url.Parse(raw)
	isHTTP := err == nil && (u.Scheme == "http" || u.Scheme == "https")
	if !isHTTP || u.Hostname() == "" {
		return "", fmt.Errorf("%q is not an engine's URL; write http://host:port", raw)
	}
	if strings.ContainsFunc(u.Hostname(), isForbiddenInHost) {
		return "", fmt.Errorf("%q has a host with other characters than letters, digits and .-_:; write its name or its address", raw)
	}
	hasMore := strings.Trim(u.Path, "/") != "" || u.RawQuery != "" || u.Fragment != "" || u.User != nil // than host and port
	if hasMore {
		return "", fmt.Errorf("%q has more than a host and a port; write http://host:port alone (a key goes into the environment, see the "+
			"profile's api_key_env)", raw)
	}
	port := cmp.Or(u.Port(), map[string]string{"http": "80", "https": "443"}[u.Scheme]) // the usual port of the scheme
	if n, err := strconv.Atoi(port); err != nil || n < 1 || n > 65535 {
		return "", fmt.Errorf("%q has no port from 1 to 65535; write http://host:port", raw)
	}
	return net.JoinHostPort(u.Hostname(), port), nil
}

// isForbiddenInHost says whether a character may not be in a host. The check is strict, because
// people copy names of engines into shells. The character % is allowed, because it separates the
// zone of an IPv6 address.
func isForbiddenInHost(r rune) bool {
	isLetter := r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z'
	isDigit := r >= '0' && r <= '9'
	return !isLetter && !isDigit && !strings.ContainsRune(".-_:%", r)
}

// Target returns the address, TLS settings and API key for calls to an engine; it names no rank.
// The API key comes from an environment variable, never from the file.
func Target(e Engine, p *mooncake.Profile) (*engine.Target, error) {
	id, err := InstanceID(e.URL)
	if err != nil {
		return nil, err
	}
	u, err := url.Parse(e.URL)
	if err != nil {
		return nil, fmt.Errorf("engine %s: %w", id, err)
	}
	t := &engine.Target{ID: id, URL: &url.URL{Scheme: u.Scheme, Host: id}, Rank: -1, First: e.First} // -1: no rank
	if u.Scheme == "https" {
		if t.TLS, err = certs.Client(cmp.Or(p.ServerName, u.Hostname()), p.CAFile, p.CertFile, p.KeyFile); err != nil {
			return nil, fmt.Errorf("engine %s: profile %s: %w", id, p.Name, err)
		}
	}
	if p.APIKeyEnv != "" {
		if t.APIKey = os.Getenv(p.APIKeyEnv); t.APIKey == "" {
			return nil, fmt.Errorf("engine %s: its profile's api_key_env names %s, which is empty; export it", id, p.APIKeyEnv)
		}
	}
	return t, nil
}

// listenProblem says why no machine can listen on an address; empty: the address has a valid form.
// Port 0 is valid and means any free port.
func listenProblem(addr string) string {
	host, port, err := net.SplitHostPort(addr)
	switch {
	case strings.Contains(addr, "://"):
		return "is a URL"
	case err != nil || port == "":
		return "is not an address"
	}
	if problem := HostProblem(host); host != "" && problem != "" { // an empty host stands for all addresses of this machine
		return "has a host that " + problem
	}
	if _, err := net.LookupPort("tcp", port); err != nil { // the port may be a number or the name of a service
		return fmt.Sprintf("has port %s, and ports are 0 to 65535", port)
	}
	return ""
}

// Loopback says whether a host is certainly this machine: localhost, or a loopback address.
func Loopback(host string) bool {
	ip := net.ParseIP(host) // nil: the host is a name
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// HostProblem says why a text cannot be the name or address of one host; empty: it can. IPv6
// addresses must have no brackets.
func HostProblem(host string) string {
	switch {
	case strings.Contains(host, "://"):
		return "is a URL"
	case strings.Contains(host, ","):
		return "is a list separated by commas"
	case strings.ContainsAny(host, " \t/@?#"):
		return "is not a name or an address"
	case strings.Contains(host, ":") && net.ParseIP(cutZone(host)) == nil:
		return "has a port, or is not an IPv6 address"
	}
	return ""
}

// cutZone removes the zone of an IPv6 address: fe80::1%eth0 becomes fe80::1.
func cutZone(host string) string {
	address, _, _ := strings.Cut(host, "%")
	return address
}

// idOf is the InstanceID of an engine, or its URL if the URL is invalid.
func idOf(e Engine) string {
	id, err := InstanceID(e.URL)
	if err != nil {
		return e.URL
	}
	return id
}
