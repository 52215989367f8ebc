package config

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/labels"
)

// Discovery has the sources of engines that are not listed in the config file. If a source finds an
// engine that the file lists, too, the settings in the file apply.
type Discovery struct {
	Probe      bool                  `yaml:"probe"` // send a test request to each engine before its first real one
	Files      []string              `yaml:"files"` // files with the keys of `engines`, read again when they change
	DNS        []DiscoveryDNS        `yaml:"dns"`
	Kubernetes []DiscoveryKubernetes `yaml:"kubernetes"`
}

// DiscoveryDNS is a DNS name whose records are the addresses of engines.
type DiscoveryDNS struct {
	Name     string        `yaml:"name"`
	Type     string        `yaml:"type"` // A (which includes AAAA) or SRV
	Role     string        `yaml:"role"`
	Scheme   string        `yaml:"scheme"`
	Port     int           `yaml:"port"` // port of the engines, only for type A; SRV records have the port themselves
	Interval time.Duration `yaml:"interval"`
	Misses   int           `yaml:"misses"` // after this many DNS answers in a row without an engine, the engine is removed
	// The following keys are settings of every engine that this source finds.
	Profile string `yaml:"profile"`
	Region  string `yaml:"region"`
	Ranks   int    `yaml:"ranks"`
	Group   string `yaml:"group"`
	Barrier string `yaml:"barrier"`
	Slots   int    `yaml:"slots"`
}

// DiscoveryKubernetes finds engines in Kubernetes: each pod that the selector selects in the
// namespace is an engine.
type DiscoveryKubernetes struct {
	Namespace  string `yaml:"namespace"`  // empty: the namespace of this proxy's pod, or of the kubeconfig
	Kubeconfig string `yaml:"kubeconfig"` // path of a kubeconfig; empty: the service account of this proxy's pod is used
	Selector   string `yaml:"selector"`
	Role       string `yaml:"role"` // role of all pods; empty: each pod has its role in the label RoleLabel
	RoleLabel  string `yaml:"role_label"`
	Port       string `yaml:"port"` // port numbers or names of container ports of the engines, separated by commas
	Scheme     string `yaml:"scheme"`
	Slices     *bool  `yaml:"endpoint_slices"`
	// The following keys are settings of every engine that this source finds. Annotations of the
	// engine's pod override them.
	Profile string `yaml:"profile"`
	Region  string `yaml:"region"`
	Ranks   int    `yaml:"ranks"`
	Group   string `yaml:"group"`
	Barrier string `yaml:"barrier"`
	Slots   int    `yaml:"slots"`
}

// DefaultRoleLabel is the pod label whose value is the engine's role, if role_label names no other
// label.
const DefaultRoleLabel = "evenkeel.io/role"

// fillDefaults sets defaults for the keys that an entry leaves out. It changes copies, so that
// configs which share the lists do not change.
func (d *Discovery) fillDefaults() {
	d.DNS, d.Kubernetes = slices.Clone(d.DNS), slices.Clone(d.Kubernetes)
	for i := range d.DNS {
		e := &d.DNS[i]
		e.Type, e.Scheme, e.Profile = cmp.Or(e.Type, "A"), cmp.Or(e.Scheme, "http"), cmp.Or(e.Profile, DefaultProfileOf(e.Role))
		e.Interval, e.Misses = cmp.Or(e.Interval, 10*time.Second), cmp.Or(e.Misses, 3)
	}
	for i := range d.Kubernetes {
		e := &d.Kubernetes[i]
		e.RoleLabel, e.Scheme = cmp.Or(e.RoleLabel, DefaultRoleLabel), cmp.Or(e.Scheme, "http")
		if e.Role != "" { // without a role, each pod gets the default profile of its own role
			e.Profile = cmp.Or(e.Profile, DefaultProfileOf(e.Role))
		}
		if e.Slices == nil {
			e.Slices = new(true)
		}
	}
}

// checkDiscovery checks the sources of engines, and that no source is listed twice.
func (c *Config) checkDiscovery(bad report) {
	files := map[string]bool{}
	for i, f := range c.Discovery.Files {
		if f == "" || files[f] {
			bad(fmt.Sprintf("$.discovery.files[%d]", i), "%q; write the path of a file, each once", f)
		}
		files[f] = true
	}
	names := map[string]bool{}
	for i := range c.Discovery.DNS {
		d, path := &c.Discovery.DNS[i], fmt.Sprintf("$.discovery.dns[%d]", i)
		if names[d.Name+" "+d.Role] {
			bad(path+".name", "%s is listed twice for %s engines; remove one", d.Name, d.Role)
		}
		names[d.Name+" "+d.Role] = true
		c.checkDNS(path, d, bad)
	}
	spaces := map[string]bool{}
	for i := range c.Discovery.Kubernetes {
		k, path := &c.Discovery.Kubernetes[i], fmt.Sprintf("$.discovery.kubernetes[%d]", i)
		if key := k.Namespace + "/" + k.Selector + " " + k.Role; spaces[key] {
			bad(path+".selector", "another entry selects the same pods; remove one")
		} else {
			spaces[key] = true
		}
		c.checkKubernetes(path, k, bad)
	}
}

// checkDNS checks one DNS name, and the settings that it gives to its engines. path names the entry
// in errors.
func (c *Config) checkDNS(path string, d *DiscoveryDNS, bad report) {
	if d.Name == "" || strings.ContainsAny(d.Name, " /:") {
		bad(path+".name", "%q is no name; write one such as decode.default.svc.cluster.local", d.Name)
	}
	if d.Type != "A" && d.Type != "SRV" {
		bad(path+".type", "%q is no type of record that engines are found by; write A (which includes AAAA) or SRV", d.Type)
	}
	if d.Type == "A" && (d.Port < 1 || d.Port > 65535) {
		bad(path+".port", "%d is no port, and A records do not tell one; write the engines' port", d.Port)
	}
	if d.Type == "SRV" && d.Port != 0 {
		bad(path+".port", "SRV records tell the port; remove it")
	}
	if !slices.Contains(Roles, d.Role) {
		bad(path+".role", "%q is not a role; write prefill, decode or aggregated", d.Role)
		return // the settings of engines cannot be checked without their role
	}
	if d.Interval < time.Second {
		bad(path+".interval", "%v is too often; write 1s or more", d.Interval)
	}
	if d.Misses < 1 {
		bad(path+".misses", "%d; write the number of answers without an engine after which it is gone", d.Misses)
	}
	c.checkDiscoveredSettings(path, d.Role, d.Scheme,
		Engine{Profile: d.Profile, Region: d.Region, Ranks: d.Ranks, Group: d.Group, Barrier: d.Barrier, Slots: d.Slots}, bad)
}

// checkKubernetes checks one selector of pods, and the settings that it gives to its engines. path
// names the entry in errors.
func (c *Config) checkKubernetes(path string, k *DiscoveryKubernetes, bad report) {
	if _, err := labels.Parse(k.Selector); err != nil || k.Selector == "" {
		bad(path+".selector", "%q selects no pods; write labels such as app=vllm,tier in (prefill,decode)", k.Selector)
	}
	if k.Port == "" {
		bad(path+".port", "write the engines' port: a number, or the name of a container port; several with commas between them")
	}
	for port := range strings.SplitSeq(k.Port, ",") {
		if n, err := strconv.Atoi(strings.TrimSpace(port)); err == nil && (n < 1 || n > 65535) {
			bad(path+".port", "%d is no port", n)
		}
	}
	role := k.Role
	switch k.Role {
	case "prefill", "decode", "aggregated":
	case "", "both": // the pods may be decode engines, so settings of these are allowed
		role = "decode"
	default:
		bad(path+".role", "%q is not a role; write prefill, decode, both or aggregated, or leave it out for pods that say it in %s", k.Role,
			k.RoleLabel)
		return
	}
	c.checkDiscoveredSettings(path, role, k.Scheme,
		Engine{Profile: k.Profile, Region: k.Region, Ranks: k.Ranks, Group: k.Group, Barrier: k.Barrier, Slots: k.Slots}, bad)
}

// checkDiscoveredSettings checks the settings that a source gives to its engines. It checks them on
// an example engine, because no engine has been found yet.
func (c *Config) checkDiscoveredSettings(path, role, scheme string, e Engine, bad report) {
	if scheme != "http" && scheme != "https" {
		bad(path+".scheme", "%q is not supported; write http or https", scheme)
		return // checkEngine would report the scheme again, as a wrong URL
	}
	e.URL = scheme + "://" + net.JoinHostPort("found", "1") // a placeholder for the address that a source finds
	c.fillEngineDefaults(role, &e)
	c.checkEngine(path, role, &e, bad)
	c.checkUnlistedRegion(path, e.Region, bad)
}

var errNoEngines = errors.New("the file is empty; write prefill: and decode:, or aggregated:, with [] for a side that is meant to have " +
	"no engines")
