package main

import (
	"archive/tar"
	"bytes"
	"crypto/x509"
	"encoding/json"
	"errors"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestTheSameArgumentsGiveTheSameBytes(t *testing.T) {
	text, err := os.ReadFile("../../../" + dockerfile)
	require.NoError(t, err)
	var r recipe
	require.NoError(t, r.read(string(text)))
	context := map[string]file{"evenkeel": {0o755, []byte("the program")}, "ca-certificates.crt": {0o644, []byte("roots")},
		"licences.txt": {0o644, []byte("texts")}}
	var first, second bytes.Buffer
	at := time.Unix(1_760_000_000, 0)
	require.NoError(t, r.archive(&first, context, "evenkeel:1.2.3", "arm64", at))
	require.NoError(t, r.archive(&second, context, "evenkeel:1.2.3", "arm64", at.UTC()))
	require.Equal(t, first.Bytes(), second.Bytes())

	outer := contents(t, &first)
	var manifest []struct {
		Config           string
		RepoTags, Layers []string
	}
	require.NoError(t, json.Unmarshal(outer["manifest.json"], &manifest))
	require.Equal(t, []string{"evenkeel:1.2.3"}, manifest[0].RepoTags)
	var about struct {
		Architecture, OS string
		Created          time.Time
		Config           struct {
			User       string
			Entrypoint []string
		}
		RootFS struct {
			DiffIDs []string `json:"diff_ids"`
		}
	}
	require.NoError(t, json.Unmarshal(outer[manifest[0].Config], &about))
	require.Equal(t, "arm64", about.Architecture)
	require.True(t, at.Equal(about.Created))
	require.Equal(t, "65532:65532", about.Config.User)
	require.Equal(t, []string{"/usr/local/bin/evenkeel"}, about.Config.Entrypoint)
	layer := outer[manifest[0].Layers[0]]
	require.Equal(t, []string{"sha256:" + sha(layer)}, about.RootFS.DiffIDs)
	inner := contents(t, bytes.NewReader(layer))
	require.Equal(t, "the program", string(inner["usr/local/bin/evenkeel"]))
	require.Contains(t, inner, "etc/ssl/certs/", "a folder stands before its files, so that every tool makes it with these rights")
}

func contents(t *testing.T, from io.Reader) map[string][]byte {
	t.Helper()
	files := map[string][]byte{}
	for r := tar.NewReader(from); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		require.NoError(t, err)
		require.False(t, h.Uid != 0 || h.Gid != 0 || h.ModTime.IsZero())
		if files[h.Name], err = io.ReadAll(r); strings.HasSuffix(h.Name, "/evenkeel") {
			require.Equal(t, int64(0o755), h.Mode)
		}
		require.NoError(t, err)
	}
}

func TestAnInstructionThatIsNotKnownIsRefused(t *testing.T) {
	var r recipe
	require.ErrorContains(t, r.read("FROM scratch\nHEALTHCHECK CMD evenkeel\n"), `Dockerfile:2: this program cannot read "HEALTHCHECK CMD evenkeel"`)
	r = recipe{}
	require.NoError(t, r.read("COPY other /other\n"))
	require.ErrorContains(t, r.archive(io.Discard, map[string]file{"evenkeel": {}}, "a:b", "amd64", time.Unix(0, 0)),
		"COPY other: the image is made of [evenkeel] only")
}

func TestTheAuthoritiesAreThoseOfTheModule(t *testing.T) {
	pool := x509.NewCertPool()
	require.True(t, pool.AppendCertsFromPEM(authorities()))
	require.Greater(t, strings.Count(string(authorities()), "BEGIN CERTIFICATE"), 80)
}

func TestAProgramThatNoImageCanRunIsRefused(t *testing.T) {
	_, err := platform([]byte("#!/bin/sh"))
	require.Error(t, err)
}
