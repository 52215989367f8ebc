package config

import (
	"crypto/tls"
	"fmt"
	"net/url"
	"os"

	"evenkeel/engine"
	"evenkeel/mooncake"
)

// Target is where calls to an engine go, without a rank. The engine's key comes from the environment, never from the file.
func Target(e Engine, p *mooncake.Profile) (*engine.Target, error) {
	id, err := InstanceID(e.URL)
	if err != nil {
		return nil, err
	}
	u, err := url.Parse(e.URL)
	if err != nil {
		return nil, fmt.Errorf("engine %s: %w", id, err)
	}
	t := &engine.Target{ID: id, URL: &url.URL{Scheme: u.Scheme, Host: id}, Rank: -1}
	if u.Scheme == "https" {
		t.TLS = &tls.Config{ServerName: u.Hostname(), MinVersion: tls.VersionTLS12}
	}
	if p.APIKeyEnv != "" {
		if t.APIKey = os.Getenv(p.APIKeyEnv); t.APIKey == "" {
			return nil, fmt.Errorf("engine %s: its profile's api_key_env names %s, which is empty; export it", id, p.APIKeyEnv)
		}
	}
	return t, nil
}
