package main

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"maps"
	"path"
	"slices"
	"strings"
	"time"

	"golang.org/x/crypto/x509roots/fallback/bundle"
)

const dockerfile = "configs/container/Dockerfile"

// recipe is what the Dockerfile says. It is read here too, so that the image needs no tool to be
// made.
type recipe struct {
	files  [][2]string // a file of the context, and its path in the image
	config struct {
		User         string
		ExposedPorts map[string]struct{}
		Env          []string
		Entrypoint   []string
		Cmd          []string
		WorkingDir   string
	}
}

// read takes the instructions that the Dockerfile of evenkeel has, and refuses all others.
func (r *recipe) read(text string) error {
	r.config.ExposedPorts = map[string]struct{}{}
	// What docker and buildah set where a Dockerfile says nothing.
	r.config.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
	r.config.WorkingDir = "/"
	for n, line := range strings.Split(text, "\n") {
		word, rest, _ := strings.Cut(line, " ")
		var err error
		switch {
		case line == "" || line[0] == '#' || line == "FROM scratch":
		case word == "COPY" && len(strings.Fields(rest)) == 2:
			r.files = append(r.files, [2]string(strings.Fields(rest)))
		case word == "USER":
			r.config.User = rest
		case word == "EXPOSE":
			for _, port := range strings.Fields(rest) {
				r.config.ExposedPorts[port+"/tcp"] = struct{}{}
			}
		case word == "ENTRYPOINT":
			err = json.Unmarshal([]byte(rest), &r.config.Entrypoint)
		case word == "CMD":
			err = json.Unmarshal([]byte(rest), &r.config.Cmd)
		default:
			err = fmt.Errorf("this program cannot read %q; teach it, or leave it out", line)
		}
		if err != nil {
			return fmt.Errorf("%s:%d: %w", dockerfile, n+1, err)
		}
	}
	return nil
}

// authorities are those that Mozilla trusts without a condition, as the version of the module that
// go.mod names has them. So the image does not depend on the machine that makes it.
func authorities() []byte {
	var text bytes.Buffer
	for root := range bundle.Roots() {
		if root.Constraint == nil {
			text.Write(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: root.Certificate}))
		}
	}
	return text.Bytes()
}

// file is one of those that the Dockerfile copies.
type file struct {
	mode int64
	text []byte
}

// archive writes the image as `docker save` does. docker, podman, buildah, kind and containerd load
// it. The same arguments give the same bytes.
func (r *recipe) archive(to io.Writer, context map[string]file, tag, arch string, at time.Time) error {
	var layer bytes.Buffer
	files := tarball{tar.NewWriter(&layer), at, map[string]bool{}}
	for _, f := range r.files {
		from, ok := context[f[0]]
		if !ok {
			return fmt.Errorf("%s: COPY %s: the image is made of %v only", dockerfile, f[0], slices.Sorted(maps.Keys(context)))
		}
		if err := files.add(strings.TrimPrefix(f[1], "/"), from); err != nil {
			return err
		}
	}
	if err := files.Close(); err != nil {
		return err
	}
	digest := sha(layer.Bytes())
	config, err := json.Marshal(map[string]any{
		"created": at.UTC(), "os": "linux", "architecture": arch, "config": r.config,
		"rootfs":  map[string]any{"type": "layers", "diff_ids": []string{"sha256:" + digest}},
		"history": []any{map[string]any{"created": at.UTC(), "created_by": "make image"}},
	})
	if err != nil {
		return err
	}
	name := sha(config) + ".json"
	manifest, err := json.Marshal([]any{map[string]any{"Config": name, "RepoTags": []string{tag}, "Layers": []string{digest + ".tar"}}})
	if err != nil {
		return err
	}
	all := tarball{tar.NewWriter(to), at, map[string]bool{}}
	for _, f := range []struct {
		name string
		text []byte
	}{{"manifest.json", manifest}, {name, config}, {digest + ".tar", layer.Bytes()}} {
		if err := all.add(f.name, file{0o644, f.text}); err != nil {
			return err
		}
	}
	return all.Close()
}

func sha(text []byte) string {
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:])
}

// tarball writes files of root, all with one time, and their folders before them.
type tarball struct {
	*tar.Writer
	at      time.Time
	folders map[string]bool
}

func (t *tarball) add(name string, f file) error {
	if folder := path.Dir(name); folder != "." && !t.folders[folder] {
		if err := t.folder(folder); err != nil {
			return err
		}
	}
	if err := t.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: f.mode, Size: int64(len(f.text)),
		ModTime: t.at}); err != nil {
		return err
	}
	_, err := t.Write(f.text)
	return err
}

func (t *tarball) folder(name string) error {
	if above := path.Dir(name); above != "." && !t.folders[above] {
		if err := t.folder(above); err != nil {
			return err
		}
	}
	t.folders[name] = true
	return t.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: name + "/", Mode: 0o755, ModTime: t.at})
}
