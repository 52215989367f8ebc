package main

import (
	"image/png"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/outside/browser"
)

func TestCameraTakesAPictureOfAPage(t *testing.T) {
	if testing.Short() {
		t.Skip("a browser takes seconds")
	}
	if _, err := browser.Chromium(); err != nil {
		t.Skip(err)
	}
	page := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte("<!doctype html><title>ready</title><p>A page"))
	}))
	defer page.Close()
	folder := t.TempDir()
	file := filepath.Join(folder, "page.png")
	var said strings.Builder
	require.NoError(t,
		run(t.Context(), []string{"-await", "document.title === 'ready'", "-width", "640", "-height", "400", page.URL, file}, &said))
	require.NoError(t, run(t.Context(), []string{"-shrink", folder}, &said))
	require.Contains(t, said.String(), "1 pictures")
	picture, err := os.Open(file)
	require.NoError(t, err)
	defer func() { require.NoError(t, picture.Close()) }()
	size, err := png.DecodeConfig(picture)
	require.NoError(t, err)
	require.Equal(t, [2]int{640, 400}, [2]int{size.Width, size.Height})
}

func TestCameraWantsAPageAndAFile(t *testing.T) {
	require.ErrorContains(t, run(t.Context(), []string{"http://127.0.0.1/"}, nil), "the URL of a page and the file of the picture")
}
