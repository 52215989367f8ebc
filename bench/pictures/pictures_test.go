package main

import (
	"bytes"
	"image"
	"image/color"
	"image/png"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestTerminalPage(t *testing.T) {
	span := func(css, text string) string { return `<span style="` + css + `">` + text + `</span>` }
	for _, c := range []struct{ name, screen, want string }{
		{"text is text, whatever it says", "a <b> & c\n", span("", "a &lt;b&gt; &amp; c\n")},
		{"colours of the sixteen, until they are reset", "\x1b[31mred\x1b[39m\x1b[104mlight\x1b[0mplain", span("color:#e5646a;", "red") + span("background:#83c3ff;", "light") + span("", "plain")},
		{"colours of the 256, and true ones", "\x1b[38;5;16ma\x1b[38;5;231mb\x1b[38;5;232mc\x1b[48;2;1;2;3md", span("color:rgb(0,0,0);", "a") + span("color:rgb(255,255,255);", "b") + span("color:rgb(8,8,8);", "c") + span("color:rgb(8,8,8);background:rgb(1,2,3);", "d")},
		{"attributes add up and end one by one", "\x1b[1;4;3mx\x1b[22;23my\x1b[mz", span("font-weight:bold;font-style:italic;text-decoration:underline;", "x") + span("text-decoration:underline;", "y") + span("", "z")},
		{"inverted is the other way round", "\x1b[7mx\x1b[27;2my", span("color:#14181d;background:#d7dde4;", "x") + span("opacity:.6;", "y")},
		{"what is no colour changes nothing", "\x1b[2Ka\x1b[38mb\x1b[38;5;999mc\x1b[99999999999999999999md", span("", "a") + span("", "b") + span("", "c") + span("", "d")},
		{"a sequence that is cut ends the page", "a\x1b[3", span("", "a")},
	} {
		require.Equal(t, terminalHead+c.want+"</pre>\n", terminalPage(c.screen), c.name)
	}
}

func TestAPictureOfFewColoursKeepsThem(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		colors := rapid.SliceOfN(rapid.Uint32(), 1, 256).Draw(t, "colours")
		picture := image.NewRGBA(image.Rect(0, 0, 16, 16))
		for i := range picture.Pix {
			if i%4 == 3 {
				picture.Pix[i] = 255
			} else {
				picture.Pix[i] = byte(colors[i/4%len(colors)] >> (8 * (i % 4)))
			}
		}
		flat := withPalette(picture)
		for y := range 16 {
			for x := range 16 {
				require.Equal(t, picture.At(x, y), flat.At(x, y))
			}
		}
	})
}

func TestAPictureOfManyColoursIsCloseAndSmaller(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	picture := image.NewRGBA(image.Rect(0, 0, 200, 200))
	for y := range 200 {
		for x := range 200 {
			picture.Set(x, y, color.RGBA{byte(x + rng.IntN(20)), byte(y), byte(x + y), 255})
		}
	}
	picture.Set(7, 7, color.RGBA{255, 0, 0, 255}) // a point that is alone in its colour
	file := filepath.Join(t.TempDir(), "p.png")
	var before bytes.Buffer
	require.NoError(t, png.Encode(&before, picture))
	require.NoError(t, os.WriteFile(file, before.Bytes(), 0o600))
	require.NoError(t, shrinkAll(filepath.Dir(file), io.Discard))
	after, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Less(t, len(after), before.Len())
	shrunk, err := png.Decode(bytes.NewReader(after))
	require.NoError(t, err)
	for y := range 200 {
		for x := range 200 {
			r, g, b, _ := picture.At(x, y).RGBA()
			r2, g2, b2, _ := shrunk.At(x, y).RGBA()
			for _, d := range []int{int(r) - int(r2), int(g) - int(g2), int(b) - int(b2)} {
				require.LessOrEqual(t, max(d, -d)>>8, 48, "at %d, %d", x, y)
			}
		}
	}
}
