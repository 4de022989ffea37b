package image

import (
	"context"
	"errors"
	"time"
)

// Store is a directory of kept images. Several processes may use one at once.
type Store struct {
	dir string
	o   Options
}

var errTODO = errors.New("image: not written yet")

// Open makes dir if needed and sweeps what crashed processes left in it.
func Open(dir string, o Options) (*Store, error) { return &Store{dir: dir, o: o}, nil }

// Parse reads a reference with the store's configuration.
func (s *Store) Parse(text string) (Ref, error) {
	return ParseRef(text, Sources{s.o.RegistryRepo, s.o.DockerRepo, s.o.Insecure})
}

// Resolve returns the image that ref means, held, fetching or making it when
// it must.
func (s *Store) Resolve(ctx context.Context, ref Ref, o ResolveOptions) (*Image, error) {
	return nil, errTODO
}

// List describes all kept images and bundles, newest use first.
func (s *Store) List() ([]Info, error) { return nil, errTODO }

// Inspect finds one kept image by reference, digest or unique digest prefix.
func (s *Store) Inspect(which string) (Info, error) { return Info{}, errTODO }

// Remove deletes one kept image or bundle; fault.Busy when it is in use.
func (s *Store) Remove(ctx context.Context, which string) error { return errTODO }

// GC removes images unused for idle and not held, blobs that no kept image
// needs, and the leavings of crashed processes.
func (s *Store) GC(ctx context.Context, idle time.Duration, dryRun bool) (Report, error) {
	return Report{}, errTODO
}

// ImportOptions are one import's wishes.
type ImportOptions struct {
	Replace  bool   // take the place of a bundle of that name
	Platform string // as in ResolveOptions
	Config   *Config
	Progress func(Progress)
}

// Import makes the bundle local/<name> from src: a docker or OCI archive, a
// root filesystem as a tar (compressed or not), a directory, or an OCI layout.
func (s *Store) Import(ctx context.Context, src, name string, o ImportOptions) (Info, error) {
	return Info{}, errTODO
}

// Push uploads the bundle local/<name> as virtkit/<name>.
func (s *Store) Push(ctx context.Context, bundle string, to Ref, o ResolveOptions) (digest string, err error) {
	return "", errTODO
}
