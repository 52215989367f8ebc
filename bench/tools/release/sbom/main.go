// Command sbom prints the bill of materials of a Go program as CycloneDX 1.5 JSON: each
// module whose code is in it, with its version and go.sum's checksum. It reads what the
// linker left in the program, so that it names what was built and nothing else. The same
// program and SOURCE_DATE_EPOCH give the same bytes.
//
//	go run ./bench/tools/release/sbom -version 1.2.3 bin/evenkeel
package main

import (
	"context"
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path"
	"runtime/debug"
	"strconv"
	"strings"
	"time"

	"evenkeel/bench/rigs/testbed"
)

func main() { testbed.Main("sbom", run) }

func run(_ context.Context, args []string, out io.Writer) error {
	flags := flag.NewFlagSet("sbom", flag.ContinueOnError)
	version := flags.String("version", "dev", "version of the program")
	if err := testbed.Parse(flags, args); err != nil {
		return err
	}
	if flags.NArg() != 1 {
		return errors.New("name one program, as in: sbom bin/evenkeel")
	}
	program, err := os.ReadFile(flags.Arg(0))
	if err != nil {
		return err
	}
	info, err := buildinfo.ReadFile(flags.Arg(0))
	if err != nil {
		return err
	}
	var at time.Time
	if epoch := os.Getenv("SOURCE_DATE_EPOCH"); epoch != "" {
		seconds, err := strconv.ParseInt(epoch, 10, 64)
		if err != nil {
			return fmt.Errorf("SOURCE_DATE_EPOCH: %w", err)
		}
		at = time.Unix(seconds, 0).UTC()
	}
	enc := json.NewEncoder(out)
	enc.SetIndent("", "  ")
	enc.SetEscapeHTML(false)
	return enc.Encode(bill(info, program, *version, at))
}

// document is the part of CycloneDX's schema that is used.
type document struct {
	Format       string       `json:"bomFormat"`
	SpecVersion  string       `json:"specVersion"`
	Serial       string       `json:"serialNumber"`
	Version      int          `json:"version"`
	Metadata     metadata     `json:"metadata"`
	Components   []component  `json:"components"`
	Dependencies []dependency `json:"dependencies"`
}

type metadata struct {
	Timestamp *time.Time `json:"timestamp,omitempty"`
	Component component  `json:"component"`
}

type component struct {
	Ref        string     `json:"bom-ref"`
	Type       string     `json:"type"`
	Name       string     `json:"name"`
	Version    string     `json:"version"`
	PURL       string     `json:"purl,omitempty"`
	Hashes     []hash     `json:"hashes,omitempty"`
	Properties []property `json:"properties,omitempty"`
}

type hash struct {
	Alg     string `json:"alg"`
	Content string `json:"content"`
}

type property struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

type dependency struct {
	Ref       string   `json:"ref"`
	DependsOn []string `json:"dependsOn,omitempty"`
}

// bill lists the modules of a program, and Go's own library. The zero time is left out.
func bill(info *debug.BuildInfo, program []byte, version string, at time.Time) *document {
	sum := sha256.Sum256(program)
	id := sum[:16] // a UUID of version 8: made from what it names
	id[6], id[8] = id[6]&0x0f|0x80, id[8]&0x3f|0x80
	self := component{
		Ref: "evenkeel", Type: "application", Name: path.Base(info.Path), Version: version,
		Hashes: []hash{{"SHA-256", hex.EncodeToString(sum[:])}},
	}
	for _, s := range info.Settings {
		switch s.Key {
		case "GOOS", "GOARCH", "CGO_ENABLED", "-trimpath", "-tags":
			self.Properties = append(self.Properties, property{"go:build:" + s.Key, s.Value})
		}
	}
	d := &document{
		Format: "CycloneDX", SpecVersion: "1.5", Version: 1,
		Serial:   fmt.Sprintf("urn:uuid:%x-%x-%x-%x-%x", id[:4], id[4:6], id[6:8], id[8:10], id[10:]),
		Metadata: metadata{Component: self},
	}
	if !at.IsZero() {
		d.Metadata.Timestamp = &at
	}
	d.add(component{Name: "stdlib", Version: strings.TrimPrefix(info.GoVersion, "go")}) // as scanners know Go's own library
	for _, m := range info.Deps {
		if m.Replace != nil {
			m = m.Replace
		}
		d.add(component{Name: m.Path, Version: m.Version, Properties: []property{{"go:sum", m.Sum}}})
	}
	all := dependency{Ref: self.Ref}
	for _, c := range d.Components {
		all.DependsOn = append(all.DependsOn, c.Ref)
	}
	d.Dependencies = []dependency{all}
	return d
}

func (d *document) add(c component) {
	c.Type = "library"
	c.PURL = "pkg:golang/" + c.Name + "@" + strings.ReplaceAll(c.Version, "+", "%2B")
	c.Ref = c.PURL
	d.Components = append(d.Components, c)
}
